# The first process of a node, alone in new mount, process, IPC and host name namespaces and in the node's network
# namespace. It gives the node private copies of the folders that container software has fixed ideas about, and
# then only keeps the namespaces: when it dies, the kernel ends every process and mount of the node.
# Use: node_init.sh NAME STATE_FOLDER BINARY_FOLDER COMMAND…, where COMMAND is what keeps it alive.
set -eu
name=$1 state=$2 binaries=$3
shift 3
node=$state/$name
trap '' CHLD # the kernel reaps orphans by itself then

# /run and /var/lib become empty. What the node needs of the machine's folders, wherever they lie, is held in
# the new /run meanwhile. mount -n, because the file that mount keeps its notes in is hidden with the old /run.
mkdir -p "$node/run"
mount -n -t tmpfs -o mode=0755 run "$node/run"
mkdir "$node/run/state" "$node/run/binaries"
mount -n --bind "$state" "$node/run/state"
mount -n --bind "$binaries" "$node/run/binaries"
mount -n --move "$node/run" /run
mount -n -t tmpfs -o mode=0755 lib /var/lib
mkdir -p "$state" "$binaries"
mount -n --move /run/state "$state"
mount -n --move /run/binaries "$binaries"
for folder in kubelet containerd cni; do
  mkdir -p "$node/$folder" "/var/lib/$folder"
  mount -n --bind "$node/$folder" "/var/lib/$folder"
done
mkdir -p "$node/log"
mount -n --bind "$node/log" /var/log
mount -n --make-rshared / # pods may ask for mounts that travel both ways
hostname "$name"
touch "$node/ready"
exec "$@"
