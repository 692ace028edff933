"""`lowp demo`: a language model trained on real text, in bf16 and under every recipe."""
