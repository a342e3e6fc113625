#include "amx.h"

#ifdef PD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pd {

#ifdef PD_AMX

#ifndef PD_TILE_REGISTERS
// Linux refuses if, say, a thread's signal stack has no room for the registers, or if a sandbox
// does not know the call.
bool TileRegisters::request() {
    // From Linux' asm/prctl.h and the state components of Intel's SDM; not in all systems' headers.
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool have_tiles() {
    static const bool granted = TileRegisters::request();
    return granted;
}

#endif

}  // namespace pd
