"""A sweep on disk and in MLflow: `ledger` is what became of each job, `measured` what a running one tells,
`table` shows it, `tracking` sends it."""
