/* Fake of NVIDIA's management library for the tests of machine/nvlink.rs. It shows four of the GPUs
   of a DGX-1V with their direct links and hides the others. With SWITCHES, it shows all GPUs, each
   with six links to NVSwitches. */
#include <stdio.h>
#include <string.h>

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char address[32];
} pci_info;

#ifndef SWITCHES
/* Bus of each GPU, and the bus at the other end of each of its links. */
static const unsigned bus_of[4] = {0x06, 0x07, 0x0a, 0x0b};
static const unsigned links_of[4][6] = {
    {0x07, 0x0a, 0x0b, 0x0b, 0x85, 0x85},
    {0x06, 0x0a, 0x0a, 0x0b, 0x86, 0x86},
    {0x06, 0x07, 0x07, 0x0b, 0x0b, 0x89},
    {0x06, 0x06, 0x07, 0x0a, 0x0a, 0x8a},
};
#endif
static int handles[256];

static int started;
int nvmlInit_v2(void) { started = 1; return 0; }
int nvmlShutdown(void) { started = 0; return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **out) {
    unsigned domain, bus, device, function;
    if (!started || sscanf(text, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return 2;
#ifndef SWITCHES
    int known = 0;
    for (int i = 0; i < 4; i++) known |= bus_of[i] == bus;
    if (!known) return 6;
#endif
    *out = &handles[bus & 255];
    return 0;
}

static unsigned bus(void *device) { return (unsigned)((int *)device - handles); }

int nvmlDeviceGetUUID(void *device, char *out, unsigned length) {
    snprintf(out, length, "GPU-%02x", bus(device));
    return 0;
}

/* The numbers of active links may have gaps: links 3 and 6 of the switched box are down. */
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *out) {
    (void)device;
#ifdef SWITCHES
    if (link >= 8) return 2;
    *out = link != 3 && link != 6;
#else
    if (link >= 6) return 2;
    *out = 1;
#endif
    return 0;
}

int nvmlDeviceGetNvLinkVersion(void *device, unsigned link, unsigned *out) {
    (void)device, (void)link;
    *out = 2;
    return 0;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_info *out) {
    memset(out, 0xff, sizeof *out);
#ifdef SWITCHES
    (void)device;
    snprintf(out->address, sizeof out->address, "00000000:%02X:00.0", 0x61 + link % 6);
#else
    for (int i = 0; i < 4; i++)
        if (bus_of[i] == bus(device))
            snprintf(out->address, sizeof out->address, "00000000:%02X:00.0", links_of[i][link]);
#endif
    return 0;
}

#ifdef SWITCHES
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *out) {
    (void)device, (void)link;
    *out = 2;
    return 0;
}
#endif
