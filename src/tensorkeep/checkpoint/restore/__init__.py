"""Restoring a training state: tensors in place, objects through their `load_state_dict`."""
