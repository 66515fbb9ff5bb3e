"""The evidence of any training loop: a library that a program calls inside its ranks."""
