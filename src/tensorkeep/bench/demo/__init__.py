"""What ``tensorkeep demo`` runs."""
