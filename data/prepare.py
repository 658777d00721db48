"""Prepare a data set for training: python data/prepare.py names"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

import config
import corpus
import errors


def main() -> None:
    defaults = config.DataConfig()
    parser = errors.Parser(description="Write data/prepared/NAME: train.bin, val.bin and meta.json.")
    parser.add_argument("name", help=f"a data set of this project: {', '.join(corpus.EMBEDDED)}")
    parser.add_argument("--val-fraction", default=str(defaults.val_fraction), help="share of the documents held out")
    parser.add_argument("--seed", default=str(defaults.split_seed), help="which documents are held out")
    args = parser.parse_args()
    settings = [f"data.name={args.name}", f"data.val_fraction={args.val_fraction}", f"data.split_seed={args.seed}"]
    data = config.parse("", overrides=settings).data  # the same types and ranges as in a training
    meta = corpus.prepare(data.name, data.val_fraction, data.split_seed)
    print(corpus.describe(data.name, meta))
    print(f"data    written to {corpus.PREPARED / data.name}")


if __name__ == "__main__":
    errors.run(main)
