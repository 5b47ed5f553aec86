"""The product's own processes with sockets that can be told to do one message harm. Only deployments under test run these."""
