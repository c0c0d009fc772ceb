"""What the processes of a benchmark run; the commands beside this folder start them."""
