"""The command ``hf-qmoe``: one function that adds each subcommand's arguments, one that runs it."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: arguments after the command's name; `None` takes those of the process.

    Returns:
        0, or 1 if the command failed for a reason that stderr names. Wrong usage exits with 2, as argparse does.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        if not _is_for_users(error):
            raise
        print(f"hf-qmoe {arguments.command}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _is_for_users(error: Exception) -> bool:
    """Whether the message of `error` is all that a user needs; others are bugs, and their traceback is of use."""
    from hf_qmoe.lora.merge_adapter import MergeError

    return isinstance(error, MergeError | OSError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-qmoe", description="4-bit Mixture-of-Experts for transformers and PEFT.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_merge(subcommands)
    return parser


def _add_merge(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subcommands.add_parser(
        "merge",
        help="merge a LoRA adapter into a float checkpoint",
        description="Merge a PEFT LoRA adapter into a float (bf16, fp16, fp32) safetensors checkpoint. The result has "
        "the layout of BASE; memory is needed for about one expert, not for the model.",
    )
    parser.add_argument("base", metavar="BASE", help="folder of the float checkpoint")
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is not empty")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> None:
    from hf_qmoe.lora.merge_checkpoint import merge_checkpoint

    def show(number: int, count: int, name: str) -> None:
        if not arguments.quiet:
            print(f"[{number}/{count}] {name}", file=sys.stderr)

    report = merge_checkpoint(
        arguments.base, arguments.adapter, arguments.out, overwrite=arguments.overwrite, on_shard=show
    )
    print(
        f"merged {report.merged_tensors:,} of {report.total_tensors:,} tensors ({report.parameters:,} adapted "
        f"parameters); wrote {_size(report.bytes_written)} to {report.out}"
    )


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


if __name__ == "__main__":
    sys.exit(main())
