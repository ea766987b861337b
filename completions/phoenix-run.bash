# bash completion of phoenix-run; made by `phoenix-run completion bash`

_phoenix_run_jobs() {
    ls -- "${PHOENIX_HOME:-${XDG_STATE_HOME:-$HOME/.local/state}/phoenix}/jobs" 2>/dev/null
}

_phoenix_run() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} verb=run first=1 position options
    local typed=" ${COMP_WORDS[*]:0:COMP_CWORD} "
    COMPREPLY=()
    case ${COMP_WORDS[1]} in
        run | status | jobs | logs | stop | resume | add-host | drain | inject-fault | drill | config | keygen | completion) ((COMP_CWORD > 1)) && verb=${COMP_WORDS[1]} first=2 ;;
    esac
    local valued=" --nproc-per-node --start-method --preload --env --job-name --nodes --spares --hostfile --local-spares --interface --port-range --ssh --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --master-addr --master-port --local-addr --role --numa-binding --monitor-interval --event-log-handler --logs-specs --checkpoint-dir --checkpoint-interval --keep --max-restarts --max-failures-per-host --signals-to-handle --shutdown-timeout --heartbeat-timeout --hang-timeout --spare-timeout --orphan-timeout --join-timeout --exit-code --rehearse --drill --snapshot-interval --replicas --replica-distance --verify-replicas --replica-bandwidth --copy-memory --log-dir --redirects -r --tee -t --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --prefix --prune --rank --node --job --duration --every --count --mtbf --seed --plan --patience "
    case $verb in
        run | config)
            for ((position = first; position < COMP_CWORD; position++)); do
                if [[ ${COMP_WORDS[position]} == -* ]]; then
                    [[ $valued == *" ${COMP_WORDS[position]//_/-} "* ]] && ((position++))
                else
                    COMPREPLY=($(compgen -f -- "$word")) # an argument of the script
                    return
                fi
            done
            ;;
    esac
    case ${previous//_/-} in
        --nproc-per-node) COMPREPLY=($(compgen -W "auto cpu gpu xpu" -- "$word")); return ;;
        --start-method) COMPREPLY=($(compgen -W "fork spawn forkserver" -- "$word")); return ;;
        --preload) COMPREPLY=($(compgen -W "auto none" -- "$word")); return ;;
        --rdzv-backend) COMPREPLY=($(compgen -W "static c10d" -- "$word")); return ;;
        --numa-binding) COMPREPLY=($(compgen -W "node socket exclusive core-complex" -- "$word")); return ;;
        --event-log-handler) COMPREPLY=($(compgen -W "null console dynamic_rendezvous" -- "$word")); return ;;
        --exit-code) COMPREPLY=($(compgen -W "phoenix worker" -- "$word")); return ;;
        --snapshot-interval) COMPREPLY=($(compgen -W "auto" -- "$word")); return ;;
        --redirects | -r) COMPREPLY=($(compgen -W "0 1 2 3" -- "$word")); return ;;
        --tee | -t) COMPREPLY=($(compgen -W "0 1 2 3" -- "$word")); return ;;
        --prefix) COMPREPLY=($(compgen -W "auto always never" -- "$word")); return ;;
        --hostfile | --log-dir) COMPREPLY=($(compgen -f -- "$word")); return ;;
        --job) COMPREPLY=($(compgen -W "$(_phoenix_run_jobs)" -- "$word")); return ;;
    esac
    [[ $valued == *" $previous "* ]] && return
    case $verb in
        run) options="--nproc-per-node --module --no-python --run-path --start-method --preload --env --job-name --detach --nodes --spares --hostfile --local-spares --interface --port-range --ssh --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --master-addr --master-port --local-addr --role --virtual-local-rank --numa-binding --monitor-interval --event-log-handler --logs-specs --checkpoint-dir --checkpoint-interval --resume --keep --max-restarts --max-failures-per-host --signals-to-handle --shutdown-timeout --heartbeat-timeout --hang-timeout --replace-stragglers --spare-timeout --orphan-timeout --join-timeout --exit-code --rehearse --allow-drills --drill --snapshot-interval --replicas --replica-distance --verify-replicas --replica-bandwidth --encrypt --copy-memory --log-dir --redirects --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --prefix --version" ;;
        status) options="--json --watch" ;;
        jobs) options="--prune" ;;
        logs) options="--rank --node --follow" ;;
        stop) options="" ;;
        resume) options="--force --detach" ;;
        add-host) options="" ;;
        drain) options="" ;;
        inject-fault) options="--rank --node --job --duration --every --count --mtbf --seed --dry-run" ;;
        drill) options="--plan --patience" ;;
        config) options="--nproc-per-node --module --no-python --run-path --start-method --preload --env --job-name --detach --nodes --spares --hostfile --local-spares --interface --port-range --ssh --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --master-addr --master-port --local-addr --role --virtual-local-rank --numa-binding --monitor-interval --event-log-handler --logs-specs --checkpoint-dir --checkpoint-interval --resume --keep --max-restarts --max-failures-per-host --signals-to-handle --shutdown-timeout --heartbeat-timeout --hang-timeout --replace-stragglers --spare-timeout --orphan-timeout --join-timeout --exit-code --rehearse --allow-drills --drill --snapshot-interval --replicas --replica-distance --verify-replicas --replica-bandwidth --encrypt --copy-memory --log-dir --redirects --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --prefix --timeouts --markdown" ;;
        keygen) options="" ;;
        completion) options="" ;;
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options --help" -- "$word"))
        return
    fi
    case $verb in
        status | logs | stop | resume) COMPREPLY=($(compgen -W "$(_phoenix_run_jobs)" -- "$word")) ;;
        inject-fault)
            case $typed in
                *" kill-worker "* | *" kill-node "* | *" kill-agent "* | *" kill-server "* | *" kill-supervisor "* | *" fail-spare "* | *" freeze "* | *" hang "* | *" hang-gil "* | *" slow "* | *" raise "* | *" exit "* | *" flip-bits "* | *" oom "* | *" fill-disk "* | *" drop-bus "* | *" delay-bus "* | *" partition "*) COMPREPLY=($(compgen -W "$(_phoenix_run_jobs)" -- "$word")) ;;
                *) COMPREPLY=($(compgen -W "kill-worker kill-node kill-agent kill-server kill-supervisor fail-spare freeze hang hang-gil slow raise exit flip-bits oom fill-disk drop-bus delay-bus partition" -- "$word")) ;;
            esac
            ;;
        completion) COMPREPLY=($(compgen -W "bash zsh fish" -- "$word")) ;;
        run)
            COMPREPLY=($(compgen -f -- "$word"))
            ((COMP_CWORD == 1)) && COMPREPLY+=($(compgen -W "run status jobs logs stop resume add-host drain inject-fault drill config keygen completion" -- "$word"))
            ;;
        config) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}

complete -o filenames -F _phoenix_run phoenix-run
