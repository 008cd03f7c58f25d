"""What is compared: experiments, designs, and the files that describe them."""
