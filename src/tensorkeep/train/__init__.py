"""ChatGoT: a compact GPT training pipeline that resumes exactly; every checkpoint goes through this library."""
