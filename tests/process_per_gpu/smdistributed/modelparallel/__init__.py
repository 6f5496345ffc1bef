"""Stands in for the package in SageMaker's training images."""
