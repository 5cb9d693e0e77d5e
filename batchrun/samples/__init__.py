"""Generated text of our own: for the tiny model's tokenizer and for the sample data sets."""
