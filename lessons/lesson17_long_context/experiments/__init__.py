"""What lesson 17 observes, compares and draws."""
