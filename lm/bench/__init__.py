"""Speed, measured: each figure beside what it is compared with, in one run on one machine."""
