"""Reports of a results file: tables, plots, CSV files and one page of HTML."""
