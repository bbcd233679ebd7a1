"""What people see of a run: the live view and the HTML report."""
