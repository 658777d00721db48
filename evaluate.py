"""How well a trained GPT predicts text it has not seen: nats per token and character, bits per byte, perplexity.

Every token of the text is predicted once, under the window rule (config.window_start): with at least seven eighths of
block_size tokens before it, wherever there are that many. Bits per byte compare models whatever their tokens are.
"""

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import config as configuration
import errors
import runs
from errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from dataset import DocumentRows
    from model import GPT
    from tokenizer import Tokenizer

POSITIONS_AT_ONCE = 16_384  # tokens a forward pass; bounds memory, does not change the result


def losses_of(
    model: "GPT", rows: "DocumentRows", autocast: AbstractContextManager[Any]
) -> "Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]":
    """(row numbers (n,), losses (n, T) in nats, targets (n, T)) of all rows, part by part; a target of -1 has loss 0.

    Draws no random numbers and puts the model back into the mode it was in: a training goes on as if nothing happened.
    """
    import numpy as np
    import torch

    was_training, device = model.training, model.wte.weight.device
    size = max(1, POSITIONS_AT_ONCE // model.config.block_size)
    model.eval()
    try:
        for first in range(0, len(rows), size):
            index = np.arange(first, min(first + size, len(rows)))
            inputs, targets = rows.rows(index)
            with torch.no_grad(), autocast:
                losses = model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
            yield index, losses.cpu().numpy(), targets
    finally:
        model.train(was_training)


def total_loss(model: "GPT", rows: "DocumentRows", autocast: AbstractContextManager[Any]) -> tuple[float, int]:
    """(sum of the losses in nats, number of targets) over every target of the rows."""
    total, count = 0.0, 0
    for _, losses, targets in losses_of(model, rows, autocast):
        total += float(losses.sum(dtype="float64"))
        count += int((targets >= 0).sum())
    return total, count


def evaluate(model: "GPT", tokenizer: "Tokenizer", rows: "DocumentRows", worst: int = 0) -> dict[str, Any]:
    """All figures of a text that is cut into rows, as a dictionary for --json; `worst`: how many documents to name.

    A separator counts as one character and one byte, as the line end that it stands for would. Of one plain text (rows
    of a single document) it names windows instead.
    """
    import numpy as np

    from log import progress

    block, single = rows.block_size, len(rows.starts) == 1
    position_loss, position_count = np.zeros(block), np.zeros(block)
    unit_loss, unit_count = (
        np.zeros(len(rows if single else rows.starts)),
        np.zeros(len(rows if single else rows.starts)),
    )
    with progress(len(rows), "rows", "evaluating") as bar:
        for index, losses, targets in losses_of(model, rows, nullcontext()):
            counted = targets >= 0
            position_loss += losses.sum(axis=0, dtype=np.float64)
            position_count += counted.sum(axis=0)
            unit = index if single else rows.document_of(index)
            np.add.at(unit_loss, unit, losses.sum(axis=1, dtype=np.float64))
            np.add.at(unit_count, unit, counted.sum(axis=1))
            bar.update(len(index))
    total, tokens = position_loss.sum(), int(position_count.sum())
    predicted = rows.tokens[rows.starts[0] + 1 :]
    times = np.bincount(predicted, minlength=tokenizer.vocab_size)
    size, characters = int(times @ tokenizer.sizes), int(times @ tokenizer.characters)
    mean = unit_loss / np.maximum(1, unit_count)
    return {
        "tokens": tokens,
        "characters": characters,
        "bytes": size,
        "nats_per_token": total / tokens,
        "nats_per_character": total / characters,
        "bits_per_byte": total / math.log(2) / size,
        "perplexity": math.exp(min(700.0, total / tokens)),
        "loss_by_position": [x / n if n else None for x, n in zip(position_loss, position_count, strict=True)],
        "worst": [
            {"nats_per_token": mean[unit], "text": tokenizer.decode(rows.predicted(unit, single))}
            for unit in np.argsort(-mean, kind="stable")[:worst].tolist()
        ],
    }


def main() -> None:
    parser = errors.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a checkpoint file or a run (default: the newest run in runs/)")
    parser.add_argument("--split", choices=["train", "val"], help="of the data it was trained on (default val)")
    parser.add_argument("--text", help="a text file or folder instead, cut into documents as the training text was")
    parser.add_argument("--field", help="--text has a JSON object a line, and the text is in this field")
    parser.add_argument("--stride", type=int, help="tokens between windows (default block_size / 8: the window rule)")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="name the N documents it predicts worst")
    parser.add_argument("--json", action="store_true", help="all figures as JSON on stdout")
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda | cuda:1 | mps")
    args = parser.parse_args()
    configuration.check_device("--device ", args.device)
    for name in ("stride", "worst"):
        if (value := getattr(args, name)) is not None and value < (1 if name == "stride" else 0):
            raise UsageError(f"--{name} {value} is too small")
    if args.text == "" or (args.text is not None and args.split) or (args.field is not None and args.text is None):
        raise UsageError("give --split, or --text FILE (with --field, if it is JSON lines)")
    files = runs.files_to_sample(runs.newest_run() if args.checkpoint is None else Path(args.checkpoint))

    # only now, with everything in order: importing torch takes seconds
    import numpy as np

    import checkpoint
    import corpus
    import device as devices
    from dataset import Data, DocumentRows

    device = devices.choose_device(args.device)
    file, content = checkpoint.read_first(files)
    model, tokenizer, config = checkpoint.rebuild(content, file, device)
    devices.limit_threads(model)
    block, documents = config.model.block_size, content["documents"]
    if args.stride and args.stride > block:
        raise UsageError(f"--stride {args.stride} leaves tokens out: it can be at most the block_size of {block}")
    if args.field and documents != "lines":
        raise UsageError(f"--field takes a document a line, which is not what {file} was trained on")
    if args.text is not None:
        source = corpus.Source(corpus.find_files([Path(args.text)]), documents, args.field)
        texts = [text for chunk in source.chunks(lambda n: None) for text in chunk]
        ids = tokenizer.encode_documents(texts) if documents else tokenizer.encode_array("".join(texts))
        tokens = np.concatenate(([tokenizer.bos_id], ids)) if documents else ids
        if len(tokens) < 2:
            raise UsageError(f"--text {args.text} has nothing to predict: it is {len(tokens)} tokens long")
        what = args.text
    else:
        data = Data(config.data, config.model, config.train.seed)
        if data.fingerprint != content["fingerprint"]:
            raise UsageError(
                f"data.name={config.data.name} is not the data of {file}: prepare it again, or give --text"
            )
        split = args.split or "val"
        tokens, what = data.tokens[split], f"the {split} split of {data.name}"
    rows = DocumentRows(tokens, tokenizer.bos_id if documents else None, block, 0, args.stride)
    figures = evaluate(model, tokenizer, rows, args.worst)
    figures = {"checkpoint": str(file), "step": content["row"]["step"], "text": what, "stride": rows.hop, **figures}
    print(json.dumps(figures, ensure_ascii=False) if args.json else report(figures))


def report(figures: dict[str, Any]) -> str:
    """The figures for a reader."""
    lines = [
        f"{figures['checkpoint']}, step {figures['step']:,}, on {figures['text']}:",
        f"{figures['tokens']:,} tokens, {figures['characters']:,} characters, {figures['bytes']:,} bytes predicted",
        f"{figures['nats_per_token']:9.4f} nats per token (perplexity {figures['perplexity']:,.2f})",
        f"{figures['nats_per_character']:9.4f} nats per character",
        f"{figures['bits_per_byte']:9.4f} bits per byte",
    ]
    by_position = [(i, loss) for i, loss in enumerate(figures["loss_by_position"]) if loss is not None]
    some = {round(2**k) - 1 for k in range(20)} | {len(figures["loss_by_position"]) - 1}
    shown = "  ".join(f"{i}: {loss:.3f}" for i, loss in by_position if i in some or len(by_position) <= 16)
    lines.append(f"nats per token by position in the window: {shown}")
    lines += [f"{worst['nats_per_token']:9.4f}  {worst['text']!r}" for worst in figures["worst"]]
    return "\n".join(lines)


if __name__ == "__main__":
    errors.run(main, reader_may_leave=True)
