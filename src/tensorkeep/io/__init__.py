"""Moving bytes: aligned buffers under one budget, parallel direct file access, and the commit."""
