"""What clouds say of machines that they are about to take, each source in a module of its own."""
