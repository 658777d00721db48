"""Sample from a trained GPT. The text goes to stdout, everything else to stderr: python sample.py | sort"""

import codecs
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import config
import errors
import runs
from errors import UsageError

ROWS_AT_ONCE = 1024  # samples drawn together, if they are short; bounds memory, does not change the result
TOKENS_AT_ONCE = 1 << 22


def main() -> None:
    parser = errors.Parser(description=__doc__)
    parser.add_argument("--checkpoint", help="a checkpoint file or a run (default: the newest run in runs/)")
    parser.add_argument("--prompt", default="", help="what every sample starts with")
    parser.add_argument("--prompt-file", help="a UTF-8 file that is the prompt as a whole; - for stdin")
    parser.add_argument("--num-samples", type=int, default=10, help="how many to draw (default 10)")
    parser.add_argument("--max-new-tokens", type=int, default=500, help="longest sample, in tokens (default 500)")
    parser.add_argument("--temperature", type=float, default=1.0, help="below 1: safer; above: wilder; 0: most likely")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens only")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the fewest tokens with this much probability"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="leave out tokens this much less likely than the first"
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same samples (default: a new one each time)")
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda | cuda:1 | mps")
    args = parser.parse_args()
    limits = {"num_samples": (1, 10**9), "max_new_tokens": (1, 10**7), "top_k": (1, 10**9), "seed": (0, 2**63 - 1)}
    for name, (least, most) in limits.items():
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UsageError(f"--{name.replace('_', '-')} {value} must be {bound}")
    if args.prompt and args.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file cannot both be given")
    config.check_device("--device ", args.device)
    # the command line is UTF-8 like every file, whatever the platform's locale says
    prompt = os.fsencode(args.prompt).decode("utf-8", "surrogateescape")
    if args.prompt_file is not None:
        prompt = read_prompt(args.prompt_file)
    run = runs.newest_run() if args.checkpoint is None else Path(args.checkpoint)
    files = runs.files_to_sample(run)

    # only now, with everything in order: importing torch takes seconds
    import checkpoint
    import device as devices
    from generate import Sampling, generate, start_of_text, store_by_column
    from log import progress

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    device = devices.choose_device(args.device)
    file, content = checkpoint.read_first(files)
    model, tokenizer, _ = checkpoint.rebuild(content, file, device)
    devices.limit_threads(model, rows=args.num_samples)
    if device.type == "cpu":
        store_by_column(model)
    documents = content["documents"]
    if documents == "lines" and args.prompt_file is not None:
        prompt = prompt.removesuffix("\n").removesuffix("\r")  # the end of the line is not part of the document
    start = start_of_text(tokenizer, documents, prompt)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    print(f"{file}, step {content['row']['step']:,}; on {devices.describe(device)}, seed {seed}", file=sys.stderr)
    settings: dict[str, Any] = {"stop_id": tokenizer.bos_id, "vocab_size": tokenizer.vocab_size}
    if args.num_samples == 1:  # shown as it comes
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back what is half a character
        print(prompt, end="", flush=True)

        def show(column: list[int]) -> None:
            pieces = (tokenizer.pieces[i] for i in column if i != tokenizer.bos_id)
            print(decoder.decode(b"".join(pieces)), end="", flush=True)

        generate(model, [start], args.max_new_tokens, sampling, seed, **settings, each=show)
        print()
        return
    rows = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // (len(start) + args.max_new_tokens)))
    for first in range(0, args.num_samples, rows):
        prompts = [start] * min(rows, args.num_samples - first)
        with progress(args.max_new_tokens, "tokens", "sampling") as bar:
            settings |= {"first_row": first, "each": lambda column, bar=bar: bar.update()}
            new = generate(model, prompts, args.max_new_tokens, sampling, seed, **settings)
        for i, ids in enumerate(new, start=first):
            if i and documents != "lines":
                print("-" * 40)  # between texts that have lines of their own
            print(prompt + tokenizer.decode(ids))
        sys.stdout.flush()


def read_prompt(name: str) -> str:
    """The text of a file, or of stdin for "-"; UsageError if it cannot be read as UTF-8."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--prompt-file {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {name} is not UTF-8 at byte {error.start}") from None


if __name__ == "__main__":
    errors.run(main, reader_may_leave=True)
