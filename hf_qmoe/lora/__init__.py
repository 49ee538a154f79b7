"""LoRA on packed experts through PEFT. The only part of the package that imports peft."""
