#!/bin/sh
# Replace the state of the containers by a backup: deploy/compose/restore.sh FOLDER
# What runs is stopped, and stays so: start it with `docker compose up --detach`. COMPOSE as in backup.sh.
set -eu
: "${COMPOSE:=docker compose}"
[ $# -eq 1 ] || { echo "usage: deploy/compose/restore.sh FOLDER" >&2; exit 2; }
folder=$(cd "$1" && pwd)
for name in etcd.db registry.tar redis.tar secrets.tar; do
  [ -s "$folder/$name" ] || { echo "error: $folder/$name is missing or empty; nothing was changed" >&2; exit 1; }
done
cd "$(dirname "$0")/../.."
[ ! -e .env ] || state=$(sed -n 's/^FLEET_STATE=//p' .env)
state=${FLEET_STATE:-${state:-.fairway/compose}}
owner=$(sed -n 's/^FLEET_UID=//p' .env 2>/dev/null || true)
owner=${FLEET_UID:-${owner:-10001}}

# All profiles: `down` leaves the containers of those that are not named.
COMPOSE_PROFILES=observability,scale,tools,vllm $COMPOSE down

echo "secrets"
mkdir -p "$state"
tar -C "$state" -xf "$folder/secrets.tar"

echo "volumes"
$COMPOSE up volumes >/dev/null
# The files go in over standard input: the containers' user need not be able to read the folder of the backup.
run() { $COMPOSE run --rm --no-deps -T --user "$owner" "$@"; }
run volumes sh -euc 'rm -rf /volumes/etcd/* /volumes/redis/* /volumes/registry/* /volumes/usage/* /volumes/files/*' </dev/null
run volumes tar -C /volumes/registry -xf - <"$folder/registry.tar"
run volumes tar -C /volumes/redis -xf - <"$folder/redis.tar"
[ ! -s "$folder/files.tar" ] || run volumes tar -C /volumes/files -xf - <"$folder/files.tar"
for part in checkpoints hours segments; do
  [ ! -s "$folder/usage-$part.tar" ] || run volumes tar -C /volumes/usage -xf - <"$folder/usage-$part.tar"
done
run volumes sh -euc 'cat >/volumes/etcd/backup.db' <"$folder/etcd.db"

echo "etcd"
restore() {
  run etcd "$1" snapshot restore /var/lib/etcd/backup.db --data-dir /var/lib/etcd/data --name etcd \
    --initial-cluster etcd=http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 </dev/null
}
# etcdutl came with 3.5, and etcdctl restores until 3.5.
restore etcdutl >/dev/null 2>&1 || restore etcdctl
echo "done: start it with $COMPOSE up --detach"
