"""How much memory training takes, predicted and measured."""
