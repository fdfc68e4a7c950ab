// The sandbox container of every pod.
module transferqueue.io/cluster/pause

go 1.26.0
