"""Training as a SageMaker job: what is sent, how it is followed, what comes back. On the workstation alone."""
