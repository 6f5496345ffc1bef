"""Starts a job as SageMaker's TensorFlow image does, by the real sagemaker-training toolkit, on one host without sshd.

Run by the image's Python, with SAGEMAKER_BASE_DIR in place of /opt/ml: `train` of the image's PATH.
"""

import os
import sys
import time
import types

os.environ["SAGEMAKER_TRAINING_MODULE"] = "sagemaker_tensorflow_container.training:main"  # as the image's ENV has it
os.environ["PYTHONUNBUFFERED"] = "1"
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]

from sagemaker_training import mpi, trainer

mpi._start_sshd_daemon = lambda: None  # mpirun starts the ranks of its own host without ssh
mpi.getfile = lambda module: ""  # the library to preload reads /opt/ml/input/config, wherever the tree is
mpi.time = types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)  # 30 s for other hosts to end
trainer.train()
