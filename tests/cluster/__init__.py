"""A real two-node Kubernetes cluster on one Linux machine, for tests and for trying things out.

Two nodes and a control plane run as ordinary programs in network namespaces of their own, built from source, with
no container engine and no virtual machine. `make cluster` brings it up; the modules, from the bottom:

paths, console, commands, errors   where things lie, how progress and failures are told
host, binaries                     what the machine must offer, and the programs built from source
cgroups, component, leftovers     processes that can always be found again, and their removal; lock: one at a time
pki, network, oci                  certificates, namespaces and links, image archives
control_plane, node                the two kinds of machine
wheels, images                     the product's images, built without a container engine
cluster, cli                       the whole, and its commands

One cluster a machine at a time.
"""
