"""What is installed here: PyTorch, the compiled parts and their files."""
