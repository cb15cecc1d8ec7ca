"""`headway models`: the registry file and the models in it."""
