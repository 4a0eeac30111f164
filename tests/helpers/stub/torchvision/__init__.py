"""Stands in for torchvision where the tests want data sets of their own: it has no
checksums, and files are what torch.save() writes. test_cifar.py tests with the real one."""
