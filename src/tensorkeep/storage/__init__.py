"""Where checkpoints lie: files of a disk, objects of a store, and the commit that makes a checkpoint visible."""
