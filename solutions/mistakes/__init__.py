"""Wrong answers that people really give, and the words each check must say to them."""
