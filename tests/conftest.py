import os

import torch

# models this small gain nothing from a second thread, and lose much when the machine is busy
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the scripts that tests start
