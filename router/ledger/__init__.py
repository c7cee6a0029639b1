"""The account of what tenants used: one row for each admitted request."""
