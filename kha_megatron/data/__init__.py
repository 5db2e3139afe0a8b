"""From text to a tokenizer and Megatron's indexed datasets."""
