"""Start the processes of a job, here, on other machines or in containers, and watch over them."""
