"""Prepare a data set for training: python data/prepare.py names | shakespeare | FILE... | FOLDER"""

import hashlib
import http.client
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

import config
import corpus
import errors
from errors import UsageError

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def main() -> None:
    defaults = config.DataConfig()
    parser = errors.Parser(description="Write data/prepared/NAME: train.bin, val.bin and meta.json.")
    parser.add_argument("text", nargs="+", help="names or shakespeare, or text files or folders of your own (.gz too)")
    parser.add_argument("--documents", choices=["lines", "blocks", "files"], help="a document a line, block or file")
    parser.add_argument("--field", help="the files have a JSON object a line, and the text is in this field")
    parser.add_argument("--name", help="what the set is called (default: as the first file)")
    parser.add_argument(
        "--tokenizer", default="", help="char | char+unk | byte | bpe:N | gpt2 | gpt2:FILE (default byte)"
    )
    parser.add_argument(
        "--val-fraction", default=str(defaults.val_fraction), help="share that is held out (default 0.1)"
    )
    parser.add_argument("--val-file", action="append", default=[], help="hold out this text instead; can be repeated")
    parser.add_argument("--seed", default=str(defaults.split_seed), help="which documents are held out (default 0)")
    parser.add_argument("--from", dest="local", help="shakespeare: a local copy instead of the download")
    args = parser.parse_args()
    settings = [f"data.val_fraction={args.val_fraction}", f"data.split_seed={args.seed}"]
    try:
        data = config.parse("", overrides=settings).data  # the same types and ranges as in a training
    except UsageError as error:
        message = str(error).replace("data.val_fraction=", "--val-fraction ").replace("data.split_seed=", "--seed ")
        raise UsageError(message) from None
    if args.text == ["names"] and (args.field or args.documents or args.val_file):
        raise UsageError("names has one document a line: --documents, --field and --val-file go with texts of your own")
    if args.local and args.text != ["shakespeare"]:
        raise UsageError("--from goes with shakespeare alone")
    documents = args.documents or ("lines" if args.field else None)
    if args.field and documents != "lines":
        raise UsageError(f"--field takes a document a line, not --documents {documents}")

    if "" in (args.name, args.field):
        raise UsageError("--name or --field is empty: leave it out, or give it a name")
    called = args.name or (
        args.text[0] if args.text in (["names"], ["shakespeare"]) else corpus.set_name(Path(args.text[0]))
    )
    if called in (*corpus.EMBEDDED, "shakespeare") and args.text != [called]:
        raise UsageError(f"{called} is a set of this project: give yours another --name")

    with tempfile.TemporaryDirectory() as downloads:
        if args.text == ["names"]:
            name, files, tokens, documents = "names", [corpus.EMBEDDED["names"]], "char", "lines"
        elif args.text == ["shakespeare"]:
            name, files, tokens = "shakespeare", [shakespeare(args.local, Path(downloads))], "char"
        else:
            paths = [Path(text) for text in args.text]
            name, files, tokens = corpus.set_name(paths[0]), corpus.find_files(paths), "byte"
        source = corpus.Source(files, documents, args.field)
        held_out = corpus.find_files(map(Path, args.val_file)) if args.val_file else []
        val_source = corpus.Source(held_out, documents, args.field) if held_out else None
        name, tokens = args.name or name, args.tokenizer or tokens
        before = corpus.fingerprint(name)
        meta = corpus.prepare(name, source, tokens, data.val_fraction, data.split_seed, val_source)
    if before not in (None, meta["fingerprint"]):
        print(f"note    {name} was another set before: runs trained on that cannot be resumed now")
    print(corpus.describe(name, meta))
    print(f"data    written to {corpus.PREPARED / name}; train with data.name={name}")


def shakespeare(local: str | None, folder: Path) -> Path:
    """The text of tiny Shakespeare, downloaded into `folder` or a local copy; UsageError if it cannot be had."""
    if local:
        if not Path(local).is_file():
            raise UsageError(f"--from {local} is no file")
        if hashlib.sha256(Path(local).read_bytes()).hexdigest() != SHAKESPEARE_SHA256:
            print(f"note: {local} is not the usual tiny Shakespeare: its SHA-256 differs", file=sys.stderr)
        return Path(local)
    try:
        with urllib.request.urlopen(SHAKESPEARE, timeout=30) as answer:
            text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"{SHAKESPEARE} cannot be downloaded ({reason}): get it otherwise and give --from FILE"
        ) from None
    if (found := hashlib.sha256(text).hexdigest()) != SHAKESPEARE_SHA256:
        raise UsageError(f"{SHAKESPEARE} has changed: its SHA-256 is {found}, not {SHAKESPEARE_SHA256}")
    (folder / "shakespeare.txt").write_bytes(text)
    return folder / "shakespeare.txt"


if __name__ == "__main__":
    errors.run(main)
