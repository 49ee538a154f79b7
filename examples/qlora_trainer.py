"""QLoRA with transformers' Trainer: experts and linear layers in 4 bit, adapters on attention and on the experts.

    python examples/qlora_trainer.py configs/qlora_tiny_cpu.yaml
    python examples/qlora_trainer.py configs/qlora_tiny_cpu.yaml --max_steps 60 --resume_from_checkpoint last
    accelerate launch examples/qlora_trainer.py configs/qlora_olmoe_1b_7b.yaml

Flags have the names of the YAML file's keys and win over them; `arguments.py` has them all.
"""

import json
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics


# Read when torch is imported: threads that wait for each other sleep, which is faster where others use the cores too.
if __name__ == "__main__":  # not for those who import this
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


from arguments import TRAINER_ARGUMENTS, DataArguments, LoraArguments, parse_arguments
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed
from transformers.data import default_data_collator


def read_documents(data_args: DataArguments) -> list[str]:
    """The documents of the file, or of Python's help; a .txt file is one document."""
    if data_args.train_file is None:
        return list(topics.values())
    path = Path(data_args.train_file)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return [text]
    if path.suffix != ".jsonl":
        raise ValueError(f"train_file={data_args.train_file!r}: the name must end in .txt or .jsonl")
    documents = [json.loads(line).get(data_args.text_field) for line in text.split("\n") if line.strip()]
    if None in documents:
        raise ValueError(f"{path} has a line without the field {data_args.text_field!r}")
    return documents


def make_blocks(data_args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[dict], list[dict]]:
    """Blocks of `block_size` tokens to train on, and held-out ones, from the documents in a row."""
    tokens: list[int] = []
    for document in read_documents(data_args):
        tokens += [*tokenizer(document, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    size = data_args.block_size
    blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    samples = [{"input_ids": block, "labels": block} for block in blocks]
    held_out = max(1, round(len(samples) * data_args.validation_split_percentage / 100))
    if len(samples) <= held_out:
        raise ValueError(f"{len(tokens)} tokens make {len(samples)} blocks of block_size={size}, not enough to split")
    return samples[:-held_out], samples[-held_out:][: data_args.max_eval_samples]


def add_lora(model: PreTrainedModel, lora_args: LoraArguments, checkpointing: bool) -> PeftModel:
    """`model` frozen, with adapters that train."""
    # Checkpointing itself is the Trainer's to switch on; use_reentrant=True needs inputs that require a gradient.
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpointing:
        model.enable_input_require_grads()
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora_args.lora_r,
        lora_alpha=lora_args.lora_alpha,
        lora_dropout=lora_args.lora_dropout,
        target_modules=lora_args.lora_target_modules,
        target_parameters=lora_args.lora_target_parameters,
    )
    return get_peft_model(model, config)


def main(argv: list[str]) -> None:
    """Trains, saves the adapter, and prints the held-out loss before and after."""
    model_args, packing_args, lora_args, data_args, args = parse_arguments(TRAINER_ARGUMENTS, argv)
    with args.main_process_first(desc="checkpoint"):
        model_args.folder()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    train, held_out = make_blocks(data_args, tokenizer)
    model = add_lora(model_args.load(packing_args), lora_args, args.activation_checkpointing)
    trainer = Trainer(model, args, default_data_collator, train, held_out, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    last = args.resume_from_checkpoint in ("last", "True", "true")
    trainer.train(resume_from_checkpoint=last or args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    step = trainer.state.global_step
    trainer.save_metrics("held_out", {"loss_before": before, "loss_after": after, "step": step})
    if trainer.is_world_process_zero():
        print(f"step {step}: held-out loss {before:.4f} before, {after:.4f} after training")


if __name__ == "__main__":
    main(sys.argv[1:])
