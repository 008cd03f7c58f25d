"""Reports of a bench run, made from its results file alone: tables, plots, CSV files and one page of HTML."""
