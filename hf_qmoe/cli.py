"""The command ``hf-qmoe``: one function that adds each subcommand's arguments, one that runs it."""

import argparse
import sys
from collections.abc import Callable, Sequence


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
    from hf_qmoe.folders import CheckpointError

    return isinstance(error, CheckpointError | OSError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-qmoe", description="4-bit Mixture-of-Experts for transformers and PEFT.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect(subcommands)
    _add_merge(subcommands)
    _add_export(subcommands)
    _add_env(subcommands)
    return parser


def _add_inspect(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subcommands.add_parser(
        "inspect",
        help="show what a checkpoint holds and what it takes in memory",
        description="Show the parts of the checkpoint in the folder PATH, what stock bitsandbytes would leave in full "
        "precision, the bytes of each format of experts, and what fits in a given memory. Only config.json and the "
        "headers of safetensors files are read; a folder with config.json alone will do.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of the checkpoint")
    parser.add_argument("--memory", metavar="SIZE", type=_memory, help="say what fits: 24GiB, 24GB, 8000MB or bytes")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.add_argument("--experts-quant-type", metavar="TYPE", help="format of the experts (nf4)")
    parser.add_argument("--experts-blocksize", metavar="N", type=int, help="weights per scale (64)")
    parser.add_argument("--experts-double-quant", action="store_true", help="quantize the scales too")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python files of PATH if it needs them")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    from hf_qmoe.config import QMoEConfig
    from hf_qmoe.inspection import InspectionError, inspect_checkpoint

    names = ("experts_quant_type", "experts_blocksize", "experts_double_quant")
    fields = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        config = QMoEConfig(**fields)
    except ValueError as error:
        raise InspectionError(str(error)) from None
    inspection = inspect_checkpoint(
        arguments.path, config, memory=arguments.memory, trust_remote_code=arguments.trust_remote_code
    )
    print(inspection.to_json() if arguments.json else inspection)


def _memory(text: str) -> int:
    from hf_qmoe.report import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _progress(arguments: argparse.Namespace) -> Callable[[int, int, str], None]:
    """Prints a line for each shard, unless the user wants quiet."""

    def show(number: int, count: int, name: str) -> None:
        if not arguments.quiet:
            print(f"[{number}/{count}] {name}", file=sys.stderr)

    return show


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
    from hf_qmoe.report import size_text

    report = merge_checkpoint(
        arguments.base, arguments.adapter, arguments.out, overwrite=arguments.overwrite, on_shard=_progress(arguments)
    )
    print(
        f"merged {report.merged_tensors:,} of {report.total_tensors:,} tensors ({report.parameters:,} adapted "
        f"parameters); wrote {size_text(report.bytes_written)} to {report.out}"
    )


def _add_export(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subcommands.add_parser(
        "export",
        help="write a packed checkpoint in a layout that others read",
        description="Write a checkpoint packed by this package in another layout. Packed bytes are kept, nothing is "
        "quantized again, and no weights are loaded. bnb-per-expert: one 4-bit bitsandbytes weight per expert and "
        "projection, as transformers v4 saved it and vLLM reads it.",
    )
    parser.add_argument("source", metavar="SOURCE", help="folder of the packed checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--layout", choices=["bnb-per-expert"], required=True, help="layout to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is not empty")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no notes")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    from hf_qmoe.export.checkpoint import export_checkpoint
    from hf_qmoe.report import size_text

    report = export_checkpoint(
        arguments.source, arguments.out, arguments.layout, overwrite=arguments.overwrite, on_shard=_progress(arguments)
    )
    for note in report.notes:
        if not arguments.quiet:
            print(f"note: {note}", file=sys.stderr)
    print(
        f"exported {report.expert_weights:,} weights of experts among {report.total_tensors:,} tensors; wrote "
        f"{size_text(report.bytes_written)} to {report.out}"
    )


def _add_env(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subcommands.add_parser(
        "env",
        help="show what the package runs on",
        description="Show versions, the CPU kernels in use or why there are none, and devices, for a bug report.",
    )
    parser.set_defaults(run=_env)


def _env(arguments: argparse.Namespace) -> None:
    from hf_qmoe.environment import environment

    facts = environment()
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


if __name__ == "__main__":
    sys.exit(main())
