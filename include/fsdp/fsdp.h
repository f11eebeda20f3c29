// All of libfsdp's public interface.
#pragma once

#include <fsdp/checkpoint.h>
#include <fsdp/context.h>
#include <fsdp/deferred_init.h>
#include <fsdp/engine.h>
#include <fsdp/error.h>
#include <fsdp/loss_scaler.h>
#include <fsdp/optimizer.h>
#include <fsdp/options.h>
#include <fsdp/recompute.h>
#include <fsdp/schedule.h>
#include <fsdp/torch_optimizer.h>
