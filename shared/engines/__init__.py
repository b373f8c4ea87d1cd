"""Ways to train one model on many ranks, taken through the same steps and compared."""
