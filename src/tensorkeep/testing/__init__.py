"""Exams for plug-in authors, and what the project's own tests are made of; nothing in the product imports it."""
