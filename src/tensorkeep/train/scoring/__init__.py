"""What a trained model is worth: its loss on a text, and its answers to multiple-choice questions."""
