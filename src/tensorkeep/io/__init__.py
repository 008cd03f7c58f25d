"""Input and output: aligned buffers under one budget, parallel direct I/O, and the commit."""
