"""Makes the golden files of the model families from transformers, see `__main__`."""
