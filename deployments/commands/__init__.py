"""What `deployments/bootstrap` and `deployments/server` are made of; not part of the installed package."""
