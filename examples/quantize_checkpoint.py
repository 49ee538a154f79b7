"""Packs a bf16 Mixture-of-Experts checkpoint to 4 bit while reading it, saves the result and reads it back.

    python examples/quantize_checkpoint.py configs/qlora_olmoe_1b_7b.yaml --quantized_model_dir olmoe-nf4

Flags have the names of the YAML file's keys and win over them; qlora_trainer.py takes the same file. All keys are in
`arguments.py`.
"""

import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from arguments import QUANTIZER_ARGUMENTS, parse_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def checksums(model: PreTrainedModel) -> dict[str, int]:
    """One of each tensor of `model`, and one of its logits for 16 tokens."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.state_dict().items()  # first: some CPU kernels repack the weights in a forward pass
        yield "logits", model(torch.arange(16, device=model.device)[None]).logits

    with torch.no_grad():
        return {name: zlib.crc32(t.cpu().reshape(-1).view(torch.uint8).numpy()) for name, t in tensors()}


def main(argv: list[str]) -> None:
    """Packs, saves, reads back. What it saves loads with ``import hf_qmoe`` and ``from_pretrained(folder)``."""
    model_args, quantization_args, output_args = parse_arguments(QUANTIZER_ARGUMENTS, argv)
    source, target = model_args.folder(), Path(output_args.quantized_model_dir)
    if not output_args.quantized_model_dir or target.resolve() == source.resolve():
        raise ValueError(f"quantized_model_dir must be a folder other than {source}, got {str(target)!r}")
    start = time.perf_counter()
    model = model_args.load(quantization_args)
    model.save_pretrained(target)
    if (source / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
    before, after = (sum(f.stat().st_size for f in d.glob("*.safetensors")) / 1e6 for d in (source, target))
    print(f"{before:.2f} MB -> {after:.2f} MB on disk ({before / after:.2f} x) in {time.perf_counter() - start:.1f} s")
    if output_args.check_reload:
        expected = checksums(model)
        del model  # makes room for the second one
        found = checksums(AutoModelForCausalLM.from_pretrained(target, dtype="auto", device_map=model_args.device_map))
        if wrong := sorted({name for name, _ in expected.items() ^ found.items()}):
            raise RuntimeError(f"{target} reads back differently: {', '.join(wrong)}")
        print(f"reload check passed: {len(found) - 1} tensors and the logits are the same, bit for bit")


if __name__ == "__main__":
    main(sys.argv[1:])
