"""A sweep on disk and in MLflow: `ledger` is what became of each job, `table` shows it, `tracking` sends it."""
