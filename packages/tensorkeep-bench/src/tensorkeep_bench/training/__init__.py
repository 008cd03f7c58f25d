"""The workload of training: a recipe with and without each technique."""
