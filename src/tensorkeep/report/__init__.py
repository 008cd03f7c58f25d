"""Reports: every table, plot and page of a run of the bench, made from its results file alone."""
