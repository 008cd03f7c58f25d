"""Exams for plug-in authors, and the tools that the project's own tests are made of. Nothing in the product imports it."""
